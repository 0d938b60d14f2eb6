"""Where workers live: in this process, in processes of their own, on Ray, on ranks of a job."""
