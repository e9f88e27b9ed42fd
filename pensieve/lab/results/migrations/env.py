"""Run by Alembic: performs the revisions on the connection, and in the transaction, that results.migrations opened."""

from alembic import context

from pensieve.lab.results.schema import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, version_table=VERSION_TABLE
)
context.run_migrations()
