"""The depot: fetches and verifies adapters and base models, serves blobs by digest, and alone holds their sources."""
