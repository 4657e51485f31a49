"""Recording a cell's calls as a plain program, and running it in their place."""
