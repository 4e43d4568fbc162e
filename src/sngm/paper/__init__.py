"""The paper's tables, run again: what to run, what was run, what it says, and writing that up."""
