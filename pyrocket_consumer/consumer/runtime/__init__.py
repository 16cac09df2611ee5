"""The life of a consumer: what it starts, keeps running and closes."""
