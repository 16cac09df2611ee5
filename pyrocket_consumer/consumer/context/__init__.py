"""Settings, subscriptions, tasks and events, which all parts of a member share."""
