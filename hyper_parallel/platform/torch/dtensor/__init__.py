"""What distributed tensors need of PyTorch: gradients, operators on local tensors, blocks that travel."""
