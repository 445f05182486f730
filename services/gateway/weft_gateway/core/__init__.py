"""The gateway's machine: requests from their arrival to their outcomes. No loop, no socket, no clock."""
