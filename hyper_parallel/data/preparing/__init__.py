"""From files of text and records to token files, once: tokenizers, chat templates, packing, the cache."""
