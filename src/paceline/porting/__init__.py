"""Reading a user's script: what it does, and how one for another library becomes one for Paceline.

    porting            what ``launch`` says of it
    reading            what its text means, and what all its workers would write at once
    tree, dataflow     its tree, which keeps comments and layout; what flows where in it
    rewrite            the same script for Paceline, pass by pass

It must not run any of it; only the last three import libcst.
"""
