r"""The rule from its definition: dense, slow, obvious. The specification and the oracle of everything faster.

Every value ``t`` of a network carries a *generator* ``X_t`` (q, features): its covariance under the Gaussian whose
precision is the matrix inequality without the output is ``X_t'X_t``. Three moves make the inequality hold.

1. *Transport.* A linear operation ``J`` acts on generators: ``X_{Jt} = X_t J'``.
2. *Eliminate.* An activation ``w = σ(v)`` with slopes in ``[c − r, c + r]`` and multipliers ``Λ`` is feasible iff
   ``U = √2 r Λ^{1/2} X_v'`` has ``UU' ≺ I``; with ``K'K = (I − UU')^{-1}`` every live value gets new noise ``KU X_t``,
   and ``X_w`` is ``c X_v`` with independent noise of covariance ``(2Λ)^{-1}``.
3. *Normalise.* A free map that feeds an activation, or the output, is chosen so that its ``U`` is any contraction:
   ``C = Λ^{-1/2} U F^{-1}/(√2 r)`` with ``FF'`` the covariance of what it reads. ``F`` always has full rank, because
   every feature gets a little independent noise: an extra input of the network, so that nothing is approximated.

The output is certified iff the generator ``X_y`` has norm at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.graph import Activation, Affine, Graph, Input, Wire
from ldlt.graph.fold import visit

__all__ = ["Elimination", "check", "choose", "contract", "factor"]


def factor(generator: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """``F = R'`` and soft projection ``P = I − Q_2'Q_2`` from ``[X; δ diag(s)] = [Q_1; Q_2] R``, ``δ = ε^{1/3}``."""
    delta = torch.finfo(generator.dtype).eps ** (1 / 3)
    size = size.clamp(min=delta * float(size.max())) + torch.finfo(generator.dtype).tiny ** 0.5
    q, r = torch.linalg.qr(torch.cat([generator, delta * size.diag()]))
    noise = q[len(generator) :]
    return r.T, torch.eye(len(r), dtype=r.dtype) - noise.T @ noise


def contract(weight: Tensor, alpha: float = 1.0) -> Tensor:
    """``U = M^{-1} W`` with ``MM' = αI + WW'``: every matrix of norm below one is one of these."""
    least = 4 * torch.finfo(weight.dtype).eps * float(weight.square().sum())
    gram = weight @ weight.T + (alpha + least) * torch.eye(len(weight), dtype=weight.dtype)
    return torch.linalg.solve(torch.linalg.cholesky(gram), weight)


def choose(weight: Tensor, generator: Tensor, size: Tensor, multiplier: Tensor, radius: Tensor) -> Tensor:
    """An explicit hidden map ``C`` from a free matrix ``W`` (move 3)."""
    root, soft = factor(generator, size)
    u = contract(weight @ soft) / (2 * multiplier).sqrt()[:, None] / radius[:, None]
    return torch.linalg.solve(root.T, u.T).T


class Elimination:
    """The moves 1 and 2 over a graph, in float64.

    Args:
        graph: The graph.
        module: Its module, for activations and constants.
        maps: Gives the matrix of a free map from its node and the generator of what it reads.
        multipliers: Gives ``Λ`` (features,) of an activation from its node and the generator of its input.
        bound: ℓ.

    Attributes:
        norms: ``‖U‖`` by activation, and of the generator of the output by ``"(output)"``: below one, at most one.
    """

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        maps: Callable[[Affine, Tensor], Tensor],
        multipliers: Callable[[Activation, Tensor], Tensor],
        bound: float,
    ) -> None:
        self.graph, self.module, self.maps, self.multipliers, self.bound = graph, module, maps, multipliers, bound
        self.tensors, self.live, self.norms = graph.tensors(module), dict[str, Tensor](), dict[str, float]()
        with torch.no_grad():
            for node in graph.nodes:
                self.live[node.name] = visit(node, [self.live[p] for p in node.parents], self)
        self.norms["(output)"] = float(torch.linalg.matrix_norm(self.live[graph.output].flatten(1), 2))

    def input(self, node: Input) -> Tensor:
        return torch.eye(node.features, dtype=torch.float64).reshape(-1, *node.shape) / self.bound

    def wire(self, node: Wire, parents: Sequence[Tensor]) -> Tensor:
        return node.linear(self.tensors)(*parents)

    def affine(self, node: Affine, parent: Tensor) -> Tensor:
        x = parent.flatten(1)
        return (x @ self.maps(node, x).T).reshape(-1, *node.shape)

    def activation(self, node: Activation, parent: Tensor) -> Tensor:
        v = parent.flatten(1)
        center, radius = activations.spread(node.resolve(self.module), node.shape)
        weight = self.multipliers(node, v)
        u = (2 * weight).sqrt()[:, None] * radius[:, None] * v.T
        self.norms[node.name] = float(torch.linalg.matrix_norm(u, 2))
        root = torch.linalg.cholesky(torch.eye(len(u), dtype=u.dtype) - u @ u.T)  # fails iff the norm is not below one
        noise = torch.linalg.solve_triangular(root, u, upper=False)  # K U
        own = torch.diag((2 * weight).rsqrt())
        for name, x in self.live.items():
            new = (noise @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])
            self.live[name] = torch.cat([x, new, x.new_zeros(len(own), *x.shape[1:])])
        return torch.cat([center * torch.cat([v, noise @ v]), own]).reshape(-1, *node.shape)


def check(
    graph: Graph, module: nn.Module, maps: Mapping[str, Tensor], multipliers: Mapping[str, Tensor], bound: float
) -> dict[str, float]:
    """Norms of all contractions for given matrices by affine node: certified iff none exceeds one (LinAlgError)."""
    return Elimination(graph, module, lambda n, _: maps[n.name], lambda n, _: multipliers[n.name], bound).norms
