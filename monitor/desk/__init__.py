"""The desk: what people decide about references and alerts (licences, exclusions, reviews), and how it acts."""
