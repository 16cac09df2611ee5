"""RocketMQ for PySpark: the data source `rocketmq`, and how far a query is behind."""
