"""Operators on distributed tensors: the dispatcher, the rules, and ways to bring your own."""
