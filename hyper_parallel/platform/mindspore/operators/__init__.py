"""The operators of the rule table, computed on local tensors by functions of MindSpore: a file for each family."""
