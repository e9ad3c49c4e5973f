"""What publisher and members of a weight push agree on: manifests, bucket layout, checksums, snapshots. No torch."""
