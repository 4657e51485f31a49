"""What is the same on every framework: the half of the platform that needs none of them."""
