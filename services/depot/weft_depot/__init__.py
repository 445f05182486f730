"""The depot: fetches and verifies adapters and base models, alone holds their sources, serves blobs by digest."""
