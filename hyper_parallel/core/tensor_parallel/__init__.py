"""Tensor parallelism: styles that cut a module's weights, plans that say which module gets which style."""
