"""Everything with effects: watches, queue, API client, Lease, probes, reconciliation."""
