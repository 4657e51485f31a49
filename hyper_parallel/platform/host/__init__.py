"""Messages, memory and files of host processes: no framework, no contract."""
