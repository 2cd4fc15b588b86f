"""Entries, one file a package or kind of package. A room imports its package inside its factories or at its top."""
