"""The formats that publisher and members of a weight push share: manifests, buckets, checksums, snapshots. No torch."""
