"""Random numbers by global element index: the same bits under every layout."""
