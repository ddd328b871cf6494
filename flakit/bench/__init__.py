"""Speed and memory, measured on a GPU and set beside a peer where one is installed. Never part of a test."""
