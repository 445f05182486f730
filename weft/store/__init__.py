"""What must outlive a process and is not desired state: outcomes, usage, key hashes, terms, model versions.

SQLAlchemy (asyncio) and Alembic; SQLite embedded, PostgreSQL in a cluster, the same statements for both. With SQLite
only the supervisor opens the file. Prompt and answer text are never stored.
"""
