"""The table writer, under its former name."""

from pensieve.lab.tables import NONE as NONE
from pensieve.lab.tables import Table as Table
from pensieve.lab.tables import estimated as estimated
from pensieve.lab.tables import markdown as markdown
from pensieve.lab.tables import show as show
