"""The study: protocols, networks, training, units of work, results on disk, and the run over all of them."""
