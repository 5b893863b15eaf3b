"""Images in the engine: signals on grids of cells, and the convolutions that act on them."""
