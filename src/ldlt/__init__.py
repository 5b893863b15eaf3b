"""Neural networks that are L-Lipschitz by construction."""
from ldlt import activations, lmi
from ldlt.network import Lipschitz
