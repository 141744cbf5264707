"""Imports what a running server needs, so that it can be imported beside other work."""

import giveway.server.api
import giveway.server.app
import giveway.server.batch_jobs.router
import giveway.server.batch_lines
import giveway.server.request_book

__all__ = ["giveway"]
