"""Drafts: tokens that a sequence's text or its adapter's earlier answers go on with, checked in the next step."""
