"""The links between hosts: who is there, who reaches whom, with which frames, how fast, and by whose fault not."""
