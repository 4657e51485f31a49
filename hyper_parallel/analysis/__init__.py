"""What a job will need, found before it runs: the dry run of one rank, and which ranks are alike."""
