"""One description of how a model is split: degrees, their meshes, and the call that composes the parallelisms."""
