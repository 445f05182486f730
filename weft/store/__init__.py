"""Durable state beyond desired state: outcomes, usage, key hashes, terms, files and batches.

SQLAlchemy (asyncio) and Alembic; SQLite embedded, PostgreSQL in a cluster, the same statements for both. Supervisor and
batch service open it, with a SQLite file each, or with a shared PostgreSQL database. Prompts are never stored. Answers
are stored only for lines of a batch, until its output file is written.
"""
