"""`giveway bench ...`: one file per published figure. Each prints machine, settings and a table."""
