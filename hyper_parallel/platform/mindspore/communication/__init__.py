"""Groups of ranks, what carries their bytes, and collectives, with gradients and without."""
