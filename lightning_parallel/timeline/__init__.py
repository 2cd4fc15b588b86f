"""What ran when on each rank: recorded, measured against theory, and written as a picture and a trace."""
