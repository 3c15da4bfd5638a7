"""What crosses between processes: configuration, messages, memory, queues."""
