"""Mixtures of experts: experts as one operator over layouts, tokens that travel to them and back."""
