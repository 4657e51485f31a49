"""Running a table: stages, messages between them, and one loop over the actions of a rank."""
