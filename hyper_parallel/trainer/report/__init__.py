"""The page about a run, and what feeds it: operations of a token, one step looked at closely, its trace."""
