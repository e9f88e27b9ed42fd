"""The history of the results database's schema, a file a revision, performed by results.migrate with Alembic."""
