"""What every parallelism needs of a module: its boundary, paths and parameters, and deferred initialisation."""
