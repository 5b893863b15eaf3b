"""Modules as graphs of linear operations, free maps and activations."""

from ldlt.graph.fold import Algebra, evaluate, fold
from ldlt.graph.nodes import (
    BATCH,
    Activation,
    Affine,
    Attr,
    Constant,
    Convolution,
    Graph,
    Input,
    Node,
    Ref,
    Tensors,
    Wire,
    index_map,
    lookup,
    resolve,
)  # fmt: skip

__all__ = [
    "BATCH", "Activation", "Affine", "Algebra", "Attr", "Constant", "Convolution", "Graph", "Input", "Node", "Ref",
    "Tensors", "Wire", "evaluate", "fold", "index_map", "lookup", "resolve",
]  # fmt: skip
