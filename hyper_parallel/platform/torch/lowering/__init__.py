"""Recording a module's calls as a plain program, and compiling it."""
