"""Long sequences: attention over tokens that lie on several ranks."""
