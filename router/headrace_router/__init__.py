"""The router: tokenises, queues, schedules every step and streams over HTTP. Never imports torch."""
