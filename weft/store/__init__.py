"""What must outlive a process and is not desired state: outcomes, usage, key hashes, terms, files and batches.

SQLAlchemy (asyncio) and Alembic; SQLite embedded, PostgreSQL in a cluster, the same statements for both. Supervisor and
batch service open it, each its own SQLite file, or both the same PostgreSQL database. Prompts are never stored, answers
only those of a batch's lines, until its output file is written.
"""
