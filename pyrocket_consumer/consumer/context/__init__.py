"""What all parts of a member share: settings, subscriptions, tasks, events."""
