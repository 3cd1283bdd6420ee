"""Reading a user's script: what it does, and how one for another library becomes one for Paceline.

    porting                 what ``launch`` says of it
    rewrite, ungroup        pass by pass
    syntax, dataflow        what its text means
    overwriting             what all its workers would write at once

It must not run any of it.
"""
