"""Images from files: Fashion-MNIST and MNIST (IDX files), CIFAR-10 (binary version); see ``docs/images.md``.

Nothing is downloaded and nothing is unpacked to disk. Every file is checked against its own size before memory is taken
for it, and whatever is wrong is said with the name of the file.
"""

from ldlt.bench.images.cifar import cifar10, read_batch
from ldlt.bench.images.idx import fashion_mnist, mnist, read_idx, read_pair
from ldlt.bench.images.image_set import ImageSet, Splits

__all__ = ["ImageSet", "Splits", "cifar10", "fashion_mnist", "mnist", "read_batch", "read_idx", "read_pair"]
