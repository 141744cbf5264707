"""`giveway bench serve`: classes of load against any server that speaks OpenAI's protocol.

Reading order: `load_class.py` (what is asked for), `workload.py` (the requests), `driver.py` (when each is sent),
`client.py` (one request), `records.py` and `figures.py` (what it says), `report.py`.
"""
