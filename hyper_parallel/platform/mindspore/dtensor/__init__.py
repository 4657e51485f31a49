"""What distributed tensors need of MindSpore: their type, gradients, operators on local tensors, blocks that travel."""
