"""Did a change make it wrong, bigger or slower?"""
